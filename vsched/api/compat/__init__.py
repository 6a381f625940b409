"""API compatibility layers: other vendors' requests are translated to chat requests, and the output to their events.

A layer has no path to the engine of its own: a schema, a translation, a formatter and error shapes. State on the server
(`store`, `previous_response_id`, conversations) is not built: it needs storage, keys and limits for something that
clients do by sending their history. `/v1/embeddings` is not built: hidden states would need another kind of result from
ranks, and requests that end without sampling.
"""

from __future__ import annotations
