"""Tables and sentences, and how a terminal or a picture shows them."""
