"""A failure trace against a system's costs, event by event: what a job would commit."""
