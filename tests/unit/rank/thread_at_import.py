"""Starts a thread when it is imported, as a library might that must not be forked."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
