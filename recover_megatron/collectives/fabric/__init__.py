"""Moves gradient buckets among the ranks of a position group. Who is dead, it need not know."""
