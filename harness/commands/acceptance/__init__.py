"""The command `acceptance`, which computes how often a draft would be accepted on given texts, for every K."""
