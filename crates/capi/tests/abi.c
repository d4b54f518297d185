/* Calls every function of the C interface: results, errors, cancellation, re-entry, threads, structs of other sizes.
 * Usage: abi [CYCLES [THREADS]]. Prints nothing and exits with 0 if all is as the header says. */

#define _POSIX_C_SOURCE 200809L
#include <iec.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            iec_string why = iec_last_error();                                                                         \
            fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, why.data);                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static iec_str text(const char *s) { return (iec_str){s, strlen(s)}; }

static iec_engine *open_engine(void) {
    iec_open_options options = {.struct_size = sizeof options, .threads = 1, .json = text("{\"device\": \"cpu\"}")};
    iec_engine *engine = NULL;
    CHECK(iec_engine_open_embedded(&options, &engine) == IEC_OK && engine);
    return engine;
}

struct seen {
    iec_engine *engine;
    iec_cancel *cancel;
    char text[4096];
    size_t length;
    int events, tokens, ends, stop_after, reentered;
    double logprobs;
};

static int on_event(void *user, const iec_event *event) {
    struct seen *seen = user;
    seen->events++;
    if (event->kind == IEC_EVENT_TEXT && seen->length + event->text.length < sizeof seen->text) {
        memcpy(seen->text + seen->length, event->text.data, event->text.length);
        seen->length += event->text.length;
    }
    seen->ends += event->kind == IEC_EVENT_END;
    seen->tokens += (int)event->tokens_length;
    for (size_t i = 0; i < event->tokens_length; i++) {
        seen->logprobs += event->tokens[i].logprob;
        CHECK(event->tokens[i].top_length == 0 || event->tokens[i].top[0].logprob <= 0);
    }
    if (seen->engine) {
        iec_ids ids;
        seen->reentered += iec_tokenize(seen->engine, text("a"), 1, &ids) == IEC_REENTERED;
        seen->reentered += iec_generate(seen->engine, NULL, NULL) == IEC_REENTERED;
        iec_engine_destroy(seen->engine); /* does nothing here */
    }
    if (seen->cancel && seen->events == 2) {
        iec_cancel_requests(seen->cancel);
    }
    return seen->stop_after && seen->events >= seen->stop_after;
}

static int32_t generate(iec_engine *engine, int32_t kind, const char *json, struct seen *seen, iec_string *out) {
    iec_request request = {.struct_size = sizeof request, .kind = kind, .json = text(json)};
    if (seen) {
        request.on_event = on_event;
        request.user = seen;
        request.cancel = seen->cancel;
    }
    return iec_generate(engine, &request, out);
}

static const char GREEDY[] = "{\"prompt\": \"Once upon a time\", \"max_tokens\": 24, \"temperature\": 0, \"logprobs\": 1}";
static const char LONG[] = "{\"prompt\": \"Once\", \"max_tokens\": 400, \"temperature\": 0, \"ignore_eos\": true}";

static void answers(iec_engine *engine) {
    struct seen seen = {.engine = engine};
    iec_string json;
    CHECK(generate(engine, IEC_COMPLETION, GREEDY, &seen, &json) == IEC_OK);
    CHECK(seen.ends == 1 && seen.tokens == 24 && seen.logprobs < 0 && seen.reentered == 2 * seen.events);
    CHECK(strncmp(seen.text, ", there was a little girl n", 27) == 0);
    CHECK(strstr(json.data, "\"finish\":\"length\"") && strlen(json.data) == json.length);
    iec_string_free(json);
    CHECK(generate(engine, IEC_CHAT, "{\"messages\": [{\"role\": \"user\", \"content\": \"Once\"}], \"max_tokens\": 3}", NULL,
                   &json) == IEC_OK);
    CHECK(strstr(json.data, "\"choices\""));
    iec_string_free(json);
    iec_request request = {.struct_size = sizeof request, .json = text(GREEDY)};
    iec_ids prompt, ids;
    CHECK(iec_prompt_ids(engine, &request, &prompt) == IEC_OK);
    CHECK(iec_tokenize(engine, text("Once upon a time"), 1, &ids) == IEC_OK && ids.length == prompt.length);
    CHECK(memcmp(ids.data, prompt.data, ids.length * sizeof *ids.data) == 0);
    CHECK(iec_detokenize(engine, ids.data, ids.length, 1, &json) == IEC_OK && strstr(json.data, "Once upon a time"));
    iec_string_free(json);
    iec_matrix logits, hidden, vector;
    CHECK(iec_logits(engine, ids.data, ids.length, &logits) == IEC_OK);
    CHECK(logits.rows == ids.length && logits.columns == 512);
    double *scores = malloc(ids.length * sizeof *scores);
    CHECK(iec_score(engine, ids.data, ids.length, scores) == IEC_OK && isnan(scores[0]));
    for (size_t row = 0; row + 1 < logits.rows; row++) {
        double sum = 0;
        const float *values = logits.values + row * logits.columns;
        for (size_t i = 0; i < logits.columns; i++) sum += exp(values[i]);
        CHECK(fabs(values[ids.data[row + 1]] - log(sum) - scores[row + 1]) < 1e-6);
    }
    free(scores);
    CHECK(iec_hidden_states(engine, ids.data, ids.length, &hidden) == IEC_OK && hidden.columns == 64);
    CHECK(iec_embed(engine, text("A dog"), IEC_POOLING_MEAN, &vector) == IEC_OK && vector.rows == 1);
    double length = 0;
    for (size_t i = 0; i < vector.columns; i++) length += vector.values[i] * vector.values[i];
    CHECK(fabs(length - 1) < 1e-5);
    iec_matrix_free(logits);
    iec_matrix_free(hidden);
    iec_matrix_free(vector);
    iec_ids_free(ids);
    iec_ids_free(prompt);
    iec_metrics metrics = {.struct_size = sizeof metrics};
    CHECK(iec_get_metrics(engine, &metrics) == IEC_OK && metrics.generated_tokens >= 27 && metrics.steps > 0);
    struct {
        size_t struct_size;
        uint64_t running, guard;
    } older = {.struct_size = sizeof(size_t) + sizeof(uint64_t), .guard = 77};
    CHECK(iec_get_metrics(engine, (iec_metrics *)&older) == IEC_OK && older.guard == 77);
    CHECK(iec_get_metrics_json(engine, &json) == IEC_OK && strstr(json.data, "generated_tokens"));
    iec_string_free(json);
    CHECK(iec_get_prometheus(engine, &json) == IEC_OK && strstr(json.data, "vllm:generation_tokens_total"));
    iec_string_free(json);
    CHECK(iec_engine_describe(engine, &json) == IEC_OK && strstr(json.data, "\"vocabulary\":512"));
    iec_string_free(json);
    CHECK(iec_adapter_list(engine, &json) == IEC_OK && strcmp(json.data, "[]") == 0);
    iec_string_free(json);
}

static void cancellation(iec_engine *engine) {
    struct seen stops = {.stop_after = 3};
    iec_string json;
    CHECK(generate(engine, IEC_COMPLETION, LONG, &stops, &json) == IEC_CANCELLED && stops.events == 3);
    CHECK(strstr(json.data, "\"finish\":\"cancelled\""));
    iec_string_free(json);
    struct seen cancels = {.cancel = iec_cancel_new()};
    CHECK(generate(engine, IEC_COMPLETION, LONG, &cancels, NULL) == IEC_CANCELLED && cancels.tokens < 400);
    cancels.events = 0;
    CHECK(generate(engine, IEC_COMPLETION, LONG, &cancels, NULL) == IEC_CANCELLED);
    iec_cancel_free(cancels.cancel);
    iec_cancel_free(NULL);
    iec_cancel_requests(NULL);
}

static void errors(iec_engine *engine) {
    iec_engine *none = NULL;
    iec_string json;
    iec_ids ids;
    CHECK(iec_engine_open(text("/no/such/model"), NULL, &none) == IEC_MODEL && !none);
    iec_string message = iec_last_error(), help = iec_last_help();
    CHECK(strstr(message.data, "/no/such/model"));
    iec_string_free(message);
    iec_string_free(help);
    CHECK(iec_engine_open_embedded(NULL, NULL) == IEC_USAGE);
    iec_open_options wrong = {.struct_size = sizeof wrong, .json = text("{\"thread\": 1}")};
    CHECK(iec_engine_open_embedded(&wrong, &none) == IEC_USAGE);
    wrong = (iec_open_options){.struct_size = 3};
    CHECK(iec_engine_open_embedded(&wrong, &none) == IEC_USAGE);
    struct {
        iec_open_options options;
        uint64_t later;
    } newer = {.options = {.struct_size = sizeof newer}, .later = 1};
    CHECK(iec_engine_open_embedded(&newer.options, &none) == IEC_USAGE);
    CHECK(iec_generate(NULL, NULL, NULL) == IEC_USAGE && iec_generate(engine, NULL, NULL) == IEC_USAGE);
    CHECK(generate(engine, 7, GREEDY, NULL, NULL) == IEC_USAGE);
    CHECK(generate(engine, IEC_COMPLETION, "{\"prompt\": \"a\", \"tempreature\": 1}", NULL, &json) == IEC_USAGE && !json.data);
    message = iec_engine_last_error(engine);
    CHECK(strstr(message.data, "tempreature"));
    iec_string_free(message);
    CHECK(generate(engine, IEC_COMPLETION, "{", NULL, NULL) == IEC_USAGE);
    CHECK(iec_tokenize(engine, (iec_str){"\xff\xfe", 2}, 1, &ids) == IEC_USAGE);
    CHECK(iec_tokenize(engine, (iec_str){NULL, 5}, 1, &ids) == IEC_USAGE);
    CHECK(iec_tokenize(engine, (iec_str){"a", (size_t)-1}, 1, &ids) == IEC_USAGE);
    CHECK(iec_tokenize(engine, text("a"), 1, NULL) == IEC_USAGE);
    uint32_t far = 512;
    iec_matrix matrix;
    CHECK(iec_logits(engine, &far, 1, &matrix) != IEC_OK && iec_logits(engine, NULL, 0, &matrix) == IEC_USAGE);
    CHECK(iec_detokenize(engine, &far, 1, 0, &json) == IEC_USAGE);
    CHECK(iec_embed(engine, text("a"), 9, &matrix) == IEC_USAGE);
    CHECK(iec_adapter_load(engine, text("a"), text("/no/such/adapter"), 1) != IEC_OK);
    CHECK(iec_adapter_unload(engine, text("a")) == IEC_USAGE);
    iec_string_free((iec_string){NULL, 0});
    iec_ids_free((iec_ids){NULL, 0});
    iec_matrix_free((iec_matrix){NULL, 0, 0});
    iec_engine_destroy(NULL);
}

static int count(void *user, iec_str label, uint64_t done, uint64_t total, int32_t unit) {
    int *calls = user;
    CHECK(label.length > 0 && done <= total && (unit == IEC_UNIT_BYTES || unit == IEC_UNIT_ITEMS));
    return ++*calls < 0;
}

static int stop(void *user, iec_str label, uint64_t done, uint64_t total, int32_t unit) {
    (void)user, (void)label, (void)done, (void)total, (void)unit;
    return 1;
}

static void conversions(const char *model) {
    char dir[] = "/tmp/iec-abi-XXXXXX", json[1000], command[100];
    CHECK(mkdtemp(dir));
    iec_string summary;
    int calls = 0;
    snprintf(json, sizeof json, "{\"model\": \"%s\", \"out_dir\": \"%s/pack\", \"bits\": 8}", model, dir);
    CHECK(iec_pack(text(json), stop, NULL, NULL) == IEC_CANCELLED);
    CHECK(iec_pack(text(json), count, &calls, &summary) == IEC_OK && calls > 0 && strstr(summary.data, "bits_per_weight"));
    iec_string_free(summary);
    CHECK(iec_pack(text(json), NULL, NULL, NULL) == IEC_USAGE);
    CHECK(iec_pack(text("{\"modle\": \"a\"}"), NULL, NULL, NULL) == IEC_USAGE);
    snprintf(json, sizeof json, "{\"pack\": \"%s/pack\"}", dir);
    CHECK(iec_verify(text(json), NULL, NULL, &summary) == IEC_OK && strstr(summary.data, "\"differences\":[]"));
    iec_string_free(summary);
    snprintf(json, sizeof json, "{\"path\": \"%s/pack\"}", dir);
    CHECK(iec_inspect(text(json), NULL, NULL, &summary) == IEC_OK && strstr(summary.data, "LlamaForCausalLM"));
    iec_string_free(summary);
    snprintf(json, sizeof json, "{\"model\": \"%s\", \"out\": \"%s/manifest.json\", \"bits\": 4}", model, dir);
    CHECK(iec_quantize(text(json), NULL, NULL, NULL) == IEC_OK);
    iec_engine *engine = NULL;
    snprintf(json, sizeof json, "%s/pack", dir);
    CHECK(iec_engine_open(text(json), NULL, &engine) == IEC_OK);
    iec_engine_destroy(engine);
    snprintf(command, sizeof command, "rm -rf %s", dir);
    CHECK(system(command) == 0);
}

static void *worker(void *argument) {
    iec_engine *engine = argument;
    for (int i = 0; i < 4; i++) {
        struct seen seen = {.stop_after = i % 2 ? 4 : 0};
        int32_t status = generate(engine, IEC_COMPLETION, GREEDY, &seen, NULL);
        CHECK(status == (i % 2 ? IEC_CANCELLED : IEC_OK));
        CHECK(strncmp(seen.text, ", there was a little girl n", seen.length < 27 ? seen.length : 27) == 0);
    }
    return NULL;
}

static long resident(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%*d %ld", &pages) == 1);
    fclose(file);
    return pages * sysconf(_SC_PAGESIZE);
}

int main(int argc, char **argv) {
    int cycles = argc > 1 ? atoi(argv[1]) : 100, threads = argc > 2 ? atoi(argv[2]) : 8;
    CHECK(iec_abi_version() >= IEC_ABI_VERSION && strlen(iec_version()) > 0);
    iec_engine *engine = open_engine();
    answers(engine);
    cancellation(engine);
    errors(engine);
    pthread_t workers[64];
    for (int i = 0; i < threads; i++) CHECK(pthread_create(&workers[i], NULL, worker, engine) == 0);
    for (int i = 0; i < threads; i++) CHECK(pthread_join(workers[i], NULL) == 0);
    iec_engine_destroy(engine);
    if (argc > 3) conversions(argv[3]);
    long before = 0;
    for (int i = 0; i < cycles; i++) {
        if (i == cycles / 5) before = resident();
        iec_engine *one = open_engine();
        CHECK(generate(one, IEC_COMPLETION, "{\"prompt\": \"a\", \"max_tokens\": 1}", NULL, NULL) == IEC_OK);
        iec_engine_destroy(one);
    }
    /* An engine of this model has some 3 MB. */
    CHECK(cycles < 50 || resident() - before < (64l << 20));
    return 0;
}
