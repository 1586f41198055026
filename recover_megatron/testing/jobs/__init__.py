"""Programs that a test or a benchmark starts under mpirun."""
