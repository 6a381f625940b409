"""Stand-ins for ranks, in layers; each adds something that real ranks have, and costs more time to run.

- timing: groups that only take time, for the fast simulator (`vsched.sim.fast.groups`);
- symbols: ranks that follow decisions over symbolic memory, for tests of the kernel (`vsched.testing.model_ranks`);
- memory: a simulated device, and workers that allocate on it what a model would (`device_memory`, `stand_in_workers`);
- a symbolic model: workers that compute by a simple rule on real bytes (`symbolic_model`, `symbolic_workers`);
- production code: the rank of a server as a task, with a clock of its own (`rank_process`).
"""
