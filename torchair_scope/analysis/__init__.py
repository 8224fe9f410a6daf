"""From a dump to the first wrong operator: reads files, and nothing of the compiler."""
