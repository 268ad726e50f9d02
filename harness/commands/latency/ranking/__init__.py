"""Many runs of `latency`: pairs by speed-up, and the ways to draft."""
