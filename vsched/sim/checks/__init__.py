"""What must hold of a simulation: invariants after every event, and conditions on the whole run."""
