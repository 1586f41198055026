"""What a run left behind, read: its progress, its report, its comparison with another."""
