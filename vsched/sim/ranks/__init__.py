"""Simulated ranks at several levels of detail.

Each level is more realistic and slower than the one before:

- timing: groups that only model time, for the fast simulator (`vsched.sim.fast.groups`);
- symbols: ranks that execute decisions on symbolic memory, for kernel tests
  (`vsched.testing.model_ranks`);
- memory: a simulated device, and workers that allocate as a model would (`device_memory`,
  `stand_in_workers`);
- a symbolic model: workers that compute with a simple rule on real bytes (`symbolic_model`,
  `symbolic_workers`);
- production code: the rank of a server as a task with its own clock (`rank_process`).
"""
