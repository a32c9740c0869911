"""The `cusearch` command: one file per sub-command, each with `add(subparsers)`."""
