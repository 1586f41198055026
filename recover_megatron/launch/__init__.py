"""Starts a job, watches over its start and its stalls, and says how it ended."""
