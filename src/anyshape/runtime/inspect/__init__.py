"""Looking into runs: memory timelines, watermarks, bytes that are touched, solved planning problems."""
