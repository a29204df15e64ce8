# SPDX-License-Identifier: Apache-2.0
"""horovodrun as a launcher that Muster drives, in its container: standard library only."""
