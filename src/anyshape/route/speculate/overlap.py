"""Overlapped speculation."""
class OverlappedRouter: pass
