"""The asyncio shell: it carries the kernel's commands out and brings it events."""
