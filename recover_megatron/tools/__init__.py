"""What users run beside training."""
