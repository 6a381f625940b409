"""Fuzzing of the HTTP API, and of schemas and grammars.

The requests are drawn here and not by schemathesis from the OpenAPI document: they contain images, broken bytes and
broken heads, they run on a virtual clock, and the same seed draws the same requests.
"""
