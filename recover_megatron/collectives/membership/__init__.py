"""Who is alive: MPI with ULFM (fault-tolerant MPI) asks, agrees, shrinks; a watchdog ends ranks."""
