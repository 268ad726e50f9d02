"""The interface between the instrument and the engines that generate text: questions, arms and their answers."""
