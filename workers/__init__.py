"""The processes of a run. Each is started by `python -m workers.NAME CONFIG [--section.key value]...`."""
