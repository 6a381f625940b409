"""Stand-ins for ranks, in layers: device memory, a symbolic model, its workers, and processes of production code."""
