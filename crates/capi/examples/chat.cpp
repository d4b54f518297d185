// Answers the messages of the standard input, one per line: chat [MODEL]. Shows a small wrapper in C++17.
//
//   c++ -std=c++17 chat.cpp $(pkg-config --cflags --libs iec) -o chat

#include <iec.h>

#include <functional>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>

namespace {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

iec_str view(const std::string &text) { return {text.data(), text.size()}; }

std::string take(iec_string text) {
    std::string taken(text.data ? text.data : "", text.length);
    iec_string_free(text);
    return taken;
}

void check(int32_t status) {
    if (status != IEC_OK) {
        throw Error(take(iec_last_error()));
    }
}

// An engine that is destroyed at the end of its scope.
class Engine {
public:
    explicit Engine(const std::string &model) {
        iec_open_options options = {};
        options.struct_size = sizeof options;
        iec_engine *opened = nullptr;
        check(model.empty() ? iec_engine_open_embedded(&options, &opened)
                            : iec_engine_open(view(model), &options, &opened));
        handle.reset(opened);
    }

    // Answers a conversation, and passes each piece of text on.
    void chat(const std::string &body, const std::function<void(std::string_view)> &show) const {
        iec_request request = {};
        request.struct_size = sizeof request;
        request.kind = IEC_CHAT;
        request.json = view(body);
        request.user = const_cast<void *>(static_cast<const void *>(&show));
        request.on_event = [](void *user, const iec_event *event) -> int32_t {
            if (event->kind == IEC_EVENT_TEXT) {
                (*static_cast<const std::function<void(std::string_view)> *>(user))(
                    {event->text.data, event->text.length});
            }
            return 0;
        };
        check(iec_generate(handle.get(), &request, nullptr));
    }

private:
    struct Destroy {
        void operator()(iec_engine *engine) const { iec_engine_destroy(engine); }
    };
    std::unique_ptr<iec_engine, Destroy> handle;
};

// Writes a text as a JSON string.
std::string quoted(const std::string &text) {
    static const char digits[] = "0123456789abcdef";
    std::string out = "\"";
    for (unsigned char c : text) {
        if (c == '"' || c == '\\' || c < 32) {
            out += std::string("\\u00") + digits[c >> 4] + digits[c & 15];
        } else {
            out += static_cast<char>(c);
        }
    }
    return out + '"';
}

}  // namespace

int main(int argc, char **argv) try {
    const Engine engine(argc > 1 ? argv[1] : "");
    std::string messages;
    for (std::string line; std::getline(std::cin, line);) {
        messages += (messages.empty() ? "" : ", ") + std::string("{\"role\": \"user\", \"content\": ") + quoted(line) + "}";
        std::string answer;
        engine.chat("{\"messages\": [" + messages + "], \"max_tokens\": 64, \"temperature\": 0}", [&](std::string_view text) {
            answer += text;
            std::cout << text << std::flush;
        });
        std::cout << std::endl;
        messages += ", {\"role\": \"assistant\", \"content\": " + quoted(answer) + "}";
    }
} catch (const std::exception &error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
}
