"""Requests of one's own as cases: every entry that can take them, through all the gates of a case."""
