"""`env.name=verifiers`: environments of that package, in a process of its own."""
