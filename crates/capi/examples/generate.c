/* Streams the text that follows a prompt: generate ["PROMPT" [MODEL]]. Without MODEL, the model that is embedded in the
 * library continues a story.
 *
 *   cc generate.c $(pkg-config --cflags --libs iec) -o generate
 */

#include <iec.h>
#include <stdio.h>
#include <string.h>

static iec_str text(const char *s) { return (iec_str){s, strlen(s)}; }

static int show(void *user, const iec_event *event) {
    (void)user;
    if (event->kind == IEC_EVENT_TEXT) {
        fwrite(event->text.data, 1, event->text.length, stdout);
        fflush(stdout);
    }
    return 0; /* another value cancels the request */
}

static int fail(void) {
    iec_string message = iec_last_error(), help = iec_last_help();
    fprintf(stderr, "error: %s\n%s\n", message.data, help.data);
    iec_string_free(message);
    iec_string_free(help);
    return 1;
}

/* Writes a text as a JSON string. */
static void quote(char *out, size_t size, const char *s) {
    size_t at = 0;
    for (; *s && at + 7 < size; s++) {
        if (*s == '"' || *s == '\\' || (unsigned char)*s < 32) {
            at += (size_t)snprintf(out + at, size - at, "\\u%04x", (unsigned char)*s);
        } else {
            out[at++] = *s;
        }
    }
    out[at] = 0;
}

int main(int argc, char **argv) {
    iec_open_options options = {.struct_size = sizeof options, .threads = 0};
    iec_engine *engine = NULL;
    int32_t status = argc > 2 ? iec_engine_open(text(argv[2]), &options, &engine)
                              : iec_engine_open_embedded(&options, &engine);
    if (status != IEC_OK) {
        return fail();
    }
    char prompt[4096], json[5000];
    quote(prompt, sizeof prompt, argc > 1 ? argv[1] : "Once upon a time");
    snprintf(json, sizeof json, "{\"prompt\": \"%s\", \"max_tokens\": 64, \"temperature\": 0}", prompt);
    iec_request request = {.struct_size = sizeof request, .kind = IEC_COMPLETION, .json = text(json), .on_event = show};
    status = iec_generate(engine, &request, NULL);
    printf("\n");
    if (status != IEC_OK) {
        fail();
    }
    iec_engine_destroy(engine);
    return status;
}
