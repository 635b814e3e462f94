"""The course's exercises, one file each; see `dtlab.grading.exercise`."""
