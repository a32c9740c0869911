"""`python -m workers.retriever CONFIG [--section.key value]...`: `cusearch worker retriever` in a checkout."""

import sys

from cusearch_async.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["worker", "retriever"]
    main()
