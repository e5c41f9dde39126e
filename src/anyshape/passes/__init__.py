"""Graph passes, one a file, each with a picture of before and after that a test runs."""
