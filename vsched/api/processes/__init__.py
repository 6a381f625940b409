"""API processes beside the engine: HTTP, text and its streams there; what comes in and what runs, in the engine.

A process holds no state that outlives its requests. It and the engine are joined by a pair of sockets (`link`), over
which go frames of messages (`messages`): all that a turn of a loop yields in one (`outbox`). In the process,
`RemoteEngine` looks like the engine; in the engine, a `Desk` does what one process asks for, and `ApiProcesses` starts
them, and starts anew those that die.
"""
