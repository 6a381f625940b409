"""`python -m tests.bench.thousand_hosts`: scaling of one kernel with the number of replicas."""
