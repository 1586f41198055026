"""What tests, scripts and benchmarks share: a scripted job, a rehearsal, a rig of hosts."""
