"""`python -m tests.bench.thousand_hosts`: how far one kernel goes as replicas are added."""
