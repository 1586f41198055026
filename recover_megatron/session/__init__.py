"""Builds one rank's part in a job, ends it, and holds what every host framework needs for it.

`start` builds, `leaving` ends. Between them a framework's adapter (adapters/megatron) hands over
gradients (`gradients`), microbatches (`feeds`), losses (`statistics`), and lets the driver run an
`iteration`. Nothing here knows Megatron.
"""
