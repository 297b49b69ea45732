"""Goes through all combinations."""

from resume_product import main

main()
