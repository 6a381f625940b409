"""The asyncio event loop on a virtual clock."""
