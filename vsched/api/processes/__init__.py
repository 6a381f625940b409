"""API processes: they handle HTTP, text and streams, and the engine's process schedules and runs requests.

A process has no state beyond its requests. A pair of sockets connects it to the engine. Each frame carries the calls
of one event loop iteration (`link`). In the process, `RemoteEngine` implements the engine's interface; in the
engine, a `ProcessSession` serves one process, and `ApiProcesses` starts the processes and restarts those that die.
"""
