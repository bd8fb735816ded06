# SPDX-License-Identifier: Apache-2.0
"""``python -m memspec_ros.cli``."""

import sys

from . import main

sys.exit(main())
