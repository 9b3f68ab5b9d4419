# SPDX-License-Identifier: Apache-2.0
"""`python -m server` is the `sampan` command."""

from server.cli import main

raise SystemExit(main())
