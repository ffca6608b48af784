"""Runs code of the policy: fork servers, namespaces, cgroups."""
