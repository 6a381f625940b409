"""Other hosts: how ranks are started there, and how decisions and bytes travel between here and there."""
