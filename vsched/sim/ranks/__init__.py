"""Simulated ranks at several levels of detail.

Each level is more realistic and slower than the one before:

- timing: groups that only model time, for the fast simulator (`vsched.sim.fast.groups`);
- memory: a simulated device, and workers that allocate as a model would (`device_memory`,
  `symbolic_workers`);
- a symbolic model: workers that compute with a simple rule on real bytes (`symbolic_model`,
  `symbolic_workers`);
- production code without time: the rank of a server, a step at a call (`stepped`);
- production code in time: the rank of a server as a task with its own clock (`rank_process`).
"""
