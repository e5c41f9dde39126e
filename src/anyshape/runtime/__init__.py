"""What runs compiled plans: memory, context, torch's operators, costs, specialisation, calls, budgets."""
