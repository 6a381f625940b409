"""Starts a thread when it is imported, like a library that must not be forked."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
