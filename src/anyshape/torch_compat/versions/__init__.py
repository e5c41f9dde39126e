"""What differs between versions of torch when programs run: calls, backports, Python kernels, side effects."""
