print("hello from inside a microVM")
