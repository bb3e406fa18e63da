"""A throw-away Slurm cluster for tests and the demo, with the faults that tocsin is about. See `cluster.Lab`."""
