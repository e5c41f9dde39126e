"""Capture: Dynamo's and export's graphs, dispatch of calls, deferred and background compilation."""
