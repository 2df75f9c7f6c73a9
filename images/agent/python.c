/* /opt/trainyard/bin/python: the agent's interpreter, isolated (-I). What a user's image sets in PYTHONHOME or
 * PYTHONPATH is for the user's own Python. */
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
    char **arguments = calloc(argc + 2, sizeof *arguments);
    if (arguments == NULL)
        return 127;
    arguments[0] = "/opt/trainyard/bin/python3.11";
    arguments[1] = "-I";
    for (int i = 1; i < argc; i++)
        arguments[i + 1] = argv[i];
    execv(arguments[0], arguments);
    return 127;
}
