"""What a failure means for the iteration in progress, and how it is carried to its commit."""
