"""What every other package needs: the error type with four parts, the one `Config`, counters, files, the disk cache."""
