"""Rematerialisation: optional steps of a backward that compute saved values again."""
