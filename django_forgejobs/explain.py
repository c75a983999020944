"""Why is this job where it is? ``reasons`` asks the predicates that the claim and the reaper use."""
